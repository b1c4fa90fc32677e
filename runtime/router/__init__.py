"""Several services behind one address: chooses a service for each request, and passes it on."""
