"""Time and memory of the attention operators, of transformer blocks and of whole models, side by side.

`operators` and `models` say what is measured, `measure` how, `jobs` runs it in processes of its own and `results` keeps
it; `scaling` reads exponents and crossovers off it, `report` and `figures` show it.
"""
