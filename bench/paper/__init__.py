"""The paper's figures and tables."""
