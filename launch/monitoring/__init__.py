"""Views of a running coordinator: the terminal dashboard, and a dashboard for Grafana."""
