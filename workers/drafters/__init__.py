"""The engines of a draft worker: a model, a head, n-grams of the text, a shared substitute."""
