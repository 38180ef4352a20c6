//! A node of others that reads quantised weights, spoilt.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::choices::Choices;
use moh_fuzz::{attack, nodes};

fuzz_target!(|bytes: &[u8]| attack(nodes::blocks, &mut Choices(bytes)));
