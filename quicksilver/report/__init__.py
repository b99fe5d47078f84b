"""Records to tables: what the paper reports beside what was measured. Reads finished records with pandas; touches no model."""
