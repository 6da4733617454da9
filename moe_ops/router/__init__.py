"""Routing: scores to expert ids and weights, the token layout, its forms in other libraries, permutation and combine."""
