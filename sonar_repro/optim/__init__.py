"""Update rules and the factory that hands them out. Importing this package loads no torch."""
