"""Run a study: python run_workflow.py [STUDY] --site NAME. See --help and the README."""

import sys

try:
    from workflow.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"n3lo: '{error.name}' is not installed here: type 'make run', which sets up first")

if __name__ == "__main__":
    sys.exit(main())
