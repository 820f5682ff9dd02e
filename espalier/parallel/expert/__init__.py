"""The expert axis: experts on different ranks, and the tokens that travel to them."""
