"""What goes with the containers, and the generator of the chart's files that follow from the code."""
