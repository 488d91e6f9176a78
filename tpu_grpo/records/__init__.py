"""The frozen records that pass between the stages of a run, one per stage, the errors with their exit codes, and the
readers and writers of JSON files."""
