"""Policies: each makes a plan from a step graph, costs and a budget; one method of a paper is one policy and file."""
