"""The kinds of heads in training: a torch module and the paper's recipe for each."""
