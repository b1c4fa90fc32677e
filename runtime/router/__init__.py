"""Several services behind one address: each request is passed to one of them."""
