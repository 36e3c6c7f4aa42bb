"""What a task executes: the body of the Parsl app, and the training program in the MPI ranks."""
