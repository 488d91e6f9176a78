"""What passes between the stages of a run, frozen: one record per stage, and the errors with their exit codes."""
