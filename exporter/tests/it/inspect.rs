//! `moh-export inspect`: lengths that a model can have, and whether it gains.

use crate::support::{Run, text};
use serde_json::Value;

fn inspect(arguments: &[&str]) -> (bool, String) {
    let done = Run::tract().command().arg("inspect").args(arguments).output().unwrap();
    (done.status.success(), text(&done.stdout) + &text(&done.stderr))
}

fn json(arguments: &[&str]) -> Value {
    let (success, said) = inspect(&[arguments, &["--json"]].concat());
    assert!(success, "{said}");
    serde_json::from_str(&said).unwrap()
}

/// A diffusion transformer for images of another size: four times the tokens are sixteen times the products of attention.
#[test]
fn a_diffusion_model_at_another_resolution() {
    let (small, large) =
        (json(&["--preset", "moh-dit-xl-90"]), json(&["--preset", "moh-dit-xl-90", "--tokens", "4096"]));
    let macs = |of: &Value| of["macs_dense"].as_u64().unwrap();
    assert!(macs(&large) > 16 * macs(&small), "{} at 256 tokens, {} at 4096", macs(&small), macs(&large));
    assert_eq!((&small["tokens"], &large["tokens"]), (&256.into(), &4096.into()));
    let (_, said) = inspect(&["--preset", "moh-dit-xl-90", "--tokens", "4096"]);
    assert!(said.starts_with("moh-dit, counted at batch = 1, 4096 tokens\n"), "{said}");
    assert_eq!(json(&["--preset", "moh-dit-xl-90", "--tokens", "256"]), small);
    let share = |of: &Value| of["gain"]["macs_saved_share"].as_f64().unwrap();
    assert!(share(&small) < 0.03 && share(&large) > 1.5 * share(&small), "{} and {}", share(&small), share(&large));
    // A checkpoint has a table of positions for its own resolution.
    let checkpoint = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/dit-tiny-75");
    let (own, other) = (json(&[checkpoint]), json(&[checkpoint, "--tokens", "64"]));
    assert!(macs(&other) > 4 * macs(&own));
}

#[test]
fn lengths_that_a_model_cannot_have() {
    let fails = |arguments: &[&str], parts: &[&str]| {
        let (success, said) = inspect(arguments);
        assert!(!success, "{said}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in:\n{said}");
        }
    };
    let square = "a moh-dit takes 4096 tokens, not 4000: its images are square; choose another --tokens";
    fails(&["--preset", "moh-dit-xl-90", "--tokens", "4000"], &[square]);
    let fixed = "a moh-vit takes 3136 tokens, not 4096: its configuration fixes the size of images";
    fails(&["--preset", "moh-vit-small-75", "--tokens", "4096"], &[fixed]);
    fails(
        &["--preset", "moh-dit-s-75", "--past", "7"],
        &["this moh-dit has no dimension past; it has batch", "leave out --past"],
    );
    for preset in ["moh-dit-s-75", "moh-llm-s"] {
        for (option, value) in [("--tokens", "0"), ("--tokens", "1048577"), ("--tokens", "-3"), ("--past", "1048577")] {
            fails(
                &["--preset", preset, &format!("{option}={value}")],
                &[option, value, "expected a whole number from ", " to 1048576"],
            );
        }
    }
}

#[test]
fn whether_a_model_gains() {
    let says = |arguments: &[&str], parts: &[&str]| {
        let (success, said) = inspect(arguments);
        assert!(success, "{said}");
        for part in parts {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in:\n{said}");
        }
        let gain = &json(arguments)["gain"];
        for key in ["routing", "kernels"] {
            assert!(said.contains(gain[key].as_str().unwrap()), "{gain}");
        }
    };
    let kernels = "The library may be faster still than the file without it";
    let little = "Do I gain? Routing cannot help much at these lengths: it saves 2.8 % of the MACs";
    says(&["--preset", "moh-vit-small-75"], &[little, "tokens use 7", "% of the heads.", kernels]);
    says(&["--preset", "moh-dit-s-75"], &["Do I gain? Routing saves 6.2 % of the MACs at these lengths.", kernels]);
    let checkpoint = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama-moh-tiny");
    says(&[checkpoint, "--family", "llama"], &["Do I gain? Routing saves nothing: tokens use every head.", kernels]);
}
