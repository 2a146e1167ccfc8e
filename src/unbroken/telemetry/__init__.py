"""What the hardware of a node does: samplers (gpu, host), recording, exporter, readers of others' recordings.

reading     what a sampler yields
gpu, host   NVML and GPM; Linux
record      the loop; spool keeps its ticks in bounded files, exporter shows the last one to Prometheus
readers     Prometheus and DCGM-exporter, IPMI power tables, the released Acme tables
join        readings over the time that a job, a phase or a plan had its GPUs
"""
