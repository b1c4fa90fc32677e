"""The speculation controller: whether and how much is drafted, judged by the cost of passes."""
