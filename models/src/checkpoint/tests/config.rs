//! Typed values of a configuration.

use super::*;

fn config() -> Config {
    let values = json!({
        "depth": 12, "eps": 1e-6, "bias": true, "name": "dit", "nothing": null,
        "zero": 0, "huge": 16777217, "heads": [4, 4, 6], "scalar": 6, "negative": -1, "mixed": [1, "a"],
        "long": "x".repeat(1000),
    });
    let Value::Object(values) = values else { unreachable!() };
    Config::new("model/config.json", values)
}

#[test]
fn values_and_defaults() {
    let config = config();
    assert_eq!((config.usize("depth").unwrap(), config.size("depth", 12).unwrap()), (12, 12));
    assert_eq!((config.usize_or("depth", 1).unwrap(), config.usize_or("absent", 1).unwrap()), (12, 1));
    assert_eq!((config.f64("eps").unwrap(), config.f64("depth").unwrap()), (1e-6, 12.0));
    assert_eq!(config.f64_or("nothing", 0.5).unwrap(), 0.5);
    assert_eq!((config.bool_or("bias", false).unwrap(), config.bool_or("absent", true).unwrap()), (true, true));
    assert_eq!((config.str_opt("name").unwrap(), config.str_opt("nothing").unwrap()), (Some("dit"), None));
    assert_eq!(config.usize_list("heads").unwrap(), [4, 4, 6]);
    assert_eq!(config.usize_or_list("heads", 3).unwrap(), [4, 4, 6]);
    assert_eq!(config.usize_or_list("scalar", 2).unwrap(), [6, 6]);
    assert!(config.has("depth") && !config.has("nothing") && !config.has("absent"));
    assert_eq!(config.value("scalar"), Some(&json!(6)));
}

#[test]
fn errors_name_file_key_and_value() {
    let config = config();
    let check = |error: Error, key: &str, expected: &str, found: &str| {
        assert!(matches!(error, Error::Config { .. }));
        assert_says(&error, &["model/config.json", &format!("{key:?}"), expected, &format!("found {found}")]);
    };
    check(config.usize("absent").unwrap_err(), "absent", "an integer from 0 to 16777216", "nothing");
    check(config.usize("nothing").unwrap_err(), "nothing", "an integer from 0 to 16777216", "nothing");
    check(config.usize("negative").unwrap_err(), "negative", "an integer from 0 to 16777216", "-1");
    check(config.size("zero", 16).unwrap_err(), "zero", "a number from 1 to 16", "0");
    check(config.size("depth", 11).unwrap_err(), "depth", "a number from 1 to 11", "12");
    check(config.usize("huge").unwrap_err(), "huge", "an integer from 0 to 16777216", "16777217");
    check(config.size("absent", 1).unwrap_err(), "absent", "an integer from 0 to 16777216", "nothing");
    check(config.rejects("depth", "an even number", "13"), "depth", "an even number", "13");
    check(config.usize_or("eps", 1).unwrap_err(), "eps", "an integer from 0 to 16777216", "1e-6");
    check(config.f64("name").unwrap_err(), "name", "a number", "\"dit\"");
    check(config.f64("absent").unwrap_err(), "absent", "a number", "nothing");
    check(config.f64_or("bias", 0.0).unwrap_err(), "bias", "a number", "true");
    check(config.bool_or("depth", true).unwrap_err(), "depth", "true or false", "12");
    check(config.str_opt("depth").unwrap_err(), "depth", "a text", "12");
    check(config.usize_list("scalar").unwrap_err(), "scalar", "a list of integers from 0 to 16777216", "6");
    check(config.usize_list("mixed").unwrap_err(), "mixed", "a list of integers from 0 to 16777216", "[1,\"a\"]");
    check(config.usize_list("absent").unwrap_err(), "absent", "a list of integers from 0 to 16777216", "nothing");
    check(config.usize_or_list("heads", 4).unwrap_err(), "heads", "or a list of 4", "[4,4,6]");
    check(config.usize_or_list("absent", 4).unwrap_err(), "absent", "or a list of 4", "nothing");
    check(config.invalid("depth", "a multiple of 5"), "depth", "a multiple of 5", "12");
    let text = config.usize("long").unwrap_err().to_string();
    assert!(text.len() < 250 && text.ends_with("..."), "{text}");
}

#[test]
fn a_malformed_configuration() {
    let folder = Folder::new();
    folder.write("model.safetensors", &file_of(&[("a", &[1], 1.0)]));
    for text in ["", "[]", "3", "{\"a\":}", "{\"a\":NaN}", &"[".repeat(100_000)] {
        folder.write("config.json", text.as_bytes());
        assert!(matches!(folder.refused(&["config.json: the configuration cannot be read"]), Error::Json { .. }));
    }
    folder.write("config.json", b"{\"\xff\":1}");
    assert!(matches!(folder.refused(&["configuration is not UTF-8"]), Error::Utf8 { .. }));
    std::fs::remove_file(folder.path("config.json")).unwrap();
    std::fs::create_dir(folder.path("config.json")).unwrap();
    assert!(matches!(folder.refused(&["config.json: not a file"]), Error::NotAFile { .. }));
}
