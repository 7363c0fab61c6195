"""Engines that train and engines that sample, behind two small contracts."""
