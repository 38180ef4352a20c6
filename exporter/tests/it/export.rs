//! `moh_export::export` as a library: what it writes, what it refuses, and what it leaves behind.

mod commit;
mod dtype;
mod existing;
mod interrupted;
mod quantize;
mod refusal;
mod support;
mod target;
mod values;
mod versions;
mod weights;
