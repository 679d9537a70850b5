"""The report of runs: what is collected (`collect`), and the page that shows it (`page`, and uPlot, which draws)."""
