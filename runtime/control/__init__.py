"""The speculation controller decides whether and how much to draft, by the cost of passes."""
