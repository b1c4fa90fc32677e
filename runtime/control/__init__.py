"""The speculation controller: whether and how much is drafted, judged by what passes cost."""
