"""A run: what it reads is opened, its parts are built, the pipeline drives them, and ``run.dir`` is its alone."""
