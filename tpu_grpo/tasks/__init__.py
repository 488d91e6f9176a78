"""Built-in tasks, for trying the whole loop without data or a model of one's own."""
