"""A run: its inputs are opened, its parts are built, the pipeline drives them; one run at a time has ``run.dir``."""
