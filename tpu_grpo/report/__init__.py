"""The pages that show a run or a check, the model card of an export, and comparisons with plans and published runs."""
