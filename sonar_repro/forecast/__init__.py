"""Step time forecast: what each operator does on a GPU, what it costs the host, and the schedule of the two."""
