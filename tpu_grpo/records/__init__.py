"""The frozen records that pass between the stages of a run, one per stage, and the errors with their exit codes."""
