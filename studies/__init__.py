"""Studies of other papers: they import the package, and nothing in it imports them."""
