"""Checks of the nodes before any rank starts: gathered on each node, judged on the head."""
