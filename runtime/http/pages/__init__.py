"""The pages for a browser: the chat and the dashboard."""
