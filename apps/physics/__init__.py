"""Calorimeter showers: what is measured of them, and how far generated ones are from real ones."""
