"""Starting, watching and ending our processes, and finding the coordinator to use."""
