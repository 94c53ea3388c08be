"""DMS (dynamic memory sparsification): a gate decides for each arriving token whether it will be dropped."""
