//! A node of `ai.moh`, spoilt: attributes, shapes, types and numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moh_fuzz::choices::Choices;
use moh_fuzz::{attack, nodes};

fuzz_target!(|bytes: &[u8]| attack(nodes::ours, &mut Choices(bytes)));
