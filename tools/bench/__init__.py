"""What `nox -s bench` measures: a table of cases, and one runner for all of them."""
