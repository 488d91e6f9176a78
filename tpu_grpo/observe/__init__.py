"""What a run measures, and how people see it: metrics, evaluations, the files of a run, and its pages."""
