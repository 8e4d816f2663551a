"""Which requests a step computes, and the columns of its plan."""
