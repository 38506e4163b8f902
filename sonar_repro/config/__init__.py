"""The typed configuration of an arm and its identity. Imports no torch and no other room."""
