"""The kinds of heads as they are trained: a module of torch, and the recipe of the paper."""
