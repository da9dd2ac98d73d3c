"""Compiled training that keeps as little as eager: one pass over the joint graph of forward and backward."""
