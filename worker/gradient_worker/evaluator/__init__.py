"""Turning a source tree into a graph of derivations (operations.md, "Recipes: jobs without Nix")."""
