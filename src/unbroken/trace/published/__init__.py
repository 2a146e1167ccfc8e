"""What is published about Acme, as fitted parameters and facts (data files beside this one)."""
