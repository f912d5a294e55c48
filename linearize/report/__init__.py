"""A run, or several side by side, as one HTML page that needs nothing else."""
