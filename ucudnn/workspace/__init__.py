"""Workspace: who allocates it, which memory may serve as workspace, and when it is free again."""
