"""Several services behind one address: which of them gets a request, and the way there and back."""
