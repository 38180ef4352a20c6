//! `moh-run generate` with several prompts, random tokens, stop texts and lines of standard input.

use crate::models::{count_on, counter, write_tokenizer};
use crate::program::{moh_run, names, outcome, refusal, run, text};
use std::io::Write;
use std::process::Stdio;

/// The counting model with a tokenizer of letters: a is 0.
fn letters() -> tempfile::TempDir {
    let (folder, _) = counter();
    write_tokenizer(folder.path());
    folder
}

fn continuation(prompt: &str, steps: usize) -> String {
    let ids: Vec<i64> = prompt.bytes().map(|byte| i64::from(byte - b'a')).collect();
    count_on(&ids, steps).iter().map(|&token| char::from(b'a' + token as u8)).collect()
}

/// Standard output of `generate` with these arguments.
fn generated(folder: &tempfile::TempDir, more: &[&str]) -> String {
    let (success, printed, errors) = run(&[&["generate", text(folder.path()), "-q"], more].concat());
    assert!(success, "{errors}");
    assert_eq!(errors, "");
    printed
}

#[test]
fn several_prompts_are_continued_as_each_alone() {
    let folder = letters();
    let prompts = ["bad", "c", "facade"];
    let expected: String = (1..)
        .zip(prompts)
        .map(|(number, prompt)| format!("==> prompt {number} <==\n{}\n", continuation(prompt, 9)))
        .collect();
    for name in names() {
        let flags: Vec<&str> = prompts.iter().flat_map(|prompt| ["--prompt", prompt]).collect();
        let printed = generated(&folder, &[&flags[..], &["--max-tokens", "9", "--runtime", name]].concat());
        assert_eq!(printed, expected);
    }
    let ids =
        generated(&folder, &["--prompt", "1", "--prompt", "2", "--ids", "--max-tokens", "2", "--runtime", "tract"]);
    let line =
        |prompt: i64| count_on(&[prompt], 2).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ") + "\n";
    assert_eq!(ids, line(1) + &line(2));
}

#[test]
fn a_stop_text_ends_each_prompt_where_it_comes() {
    let folder = letters();
    let full = ["bad", "c"].map(|prompt| continuation(prompt, 30));
    let stop = &full[0][6..8];
    let until = |text: &str| text.find(stop).map_or(text, |at| &text[..at]).to_owned();
    assert!(until(&full[0]).len() <= 6);
    let base = ["--max-tokens", "30", "--runtime", "tract", "--stop", stop];
    assert_eq!(generated(&folder, &[&base[..], &["--prompt", "bad"]].concat()), until(&full[0]) + "\n");
    let both = generated(&folder, &[&base[..], &["--prompt", "bad", "--prompt", "c"]].concat());
    assert_eq!(both, format!("==> prompt 1 <==\n{}\n==> prompt 2 <==\n{}\n", until(&full[0]), until(&full[1])));
}

#[test]
fn random_text_depends_on_the_seed() {
    let folder = letters();
    let draw = |more: &[&str]| {
        generated(&folder, &[&["--prompt", "bad", "--max-tokens", "20", "--runtime", "tract"], more].concat())
    };
    let greedy = continuation("bad", 20) + "\n";
    let drawn = draw(&["--temperature", "50", "--seed", "5"]);
    assert_eq!(drawn, draw(&["--temperature", "50", "--seed", "5"]));
    assert_ne!(drawn, draw(&["--temperature", "50", "--seed", "6"]));
    assert_ne!(drawn, greedy);
    assert_eq!(draw(&["--temperature", "50", "--top-k", "1"]), greedy);
    assert_eq!(draw(&["--top-p", "0.01", "--seed", "9"]), greedy);
    assert_eq!(draw(&["--temperature", "0", "--seed", "9"]), greedy);
    let model = folder.path().join("model.onnx");
    let told = |more: &[&str]| {
        let base = ["generate", text(&model), "--prompt", "bad", "--max-tokens", "2", "--runtime", "tract"];
        let (success, _, errors) = run(&[&base[..], more].concat());
        assert!(success, "{errors}");
        let told = |option: &&str| errors.contains(&format!("note: {option} changes nothing"));
        ["--seed", "--top-k", "--top-p"].into_iter().filter(told).collect::<Vec<_>>()
    };
    assert_eq!(told(&["--seed", "9"]), ["--seed"]);
    assert_eq!(told(&["--seed", "9", "--temperature", "0"]), ["--seed"]);
    assert_eq!(told(&["--top-k", "2", "--top-p", "0.5", "--temperature", "0"]), ["--top-k", "--top-p"]);
    assert!(told(&["--seed", "9", "--top-k", "2"]).is_empty() && told(&[]).is_empty());
}

#[test]
fn every_line_is_continued_and_a_bad_one_is_told() {
    let folder = letters();
    std::fs::write(folder.path().join("config.json"), r#"{"max_position_embeddings": 12}"#).unwrap();
    let args = ["generate", text(folder.path()), "--interactive", "--max-tokens", "5", "-q", "--runtime", "tract"];
    let mut child = moh_run(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"bad\n\nabcdefghijka\r\nc").unwrap();
    let (success, printed, errors) = outcome(&child.wait_with_output().unwrap());
    assert!(success, "{errors}");
    assert_eq!(printed, format!("{}\n{}\n", continuation("bad", 5), continuation("c", 5)));
    assert_eq!(errors, "error: the prompt has 12 tokens, the model's longest sequence is 12\n");
}

/// A batch is as long as its longest prompt, whichever place that has.
#[test]
fn the_longest_prompt_of_a_batch_leaves_the_room() {
    let folder = letters();
    std::fs::write(folder.path().join("config.json"), r#"{"max_position_embeddings": 8}"#).unwrap();
    let base = ["generate", text(folder.path()), "--runtime", "tract", "--max-tokens", "9"];
    for prompts in [["bad", "facade"], ["facade", "bad"]] {
        let flags = prompts.map(|prompt| ["--prompt", prompt]).concat();
        let (success, printed, errors) = run(&[&base[..], &flags].concat());
        assert!(success, "{errors}");
        let [first, second] = prompts.map(|prompt| continuation(prompt, 2));
        assert_eq!(printed, format!("==> prompt 1 <==\n{first}\n==> prompt 2 <==\n{second}\n"));
        assert!(errors.contains("note: at most 2 tokens, because the model's longest sequence is 8"), "{errors}");
    }
    let errors = refusal(&[&base[..], &["--prompt", "a", "--prompt", "facadeab"]].concat());
    assert!(errors.contains("the prompt has 8 tokens, the model's longest sequence is 8"), "{errors}");
}

/// Numbers in, numbers out: no tokenizer is looked for.
#[test]
fn token_numbers_need_no_tokenizer() {
    let (folder, _) = counter();
    let numbers = |prompt: &[i64], steps| {
        let numbers: Vec<String> = count_on(prompt, steps).iter().map(ToString::to_string).collect();
        numbers.join(" ")
    };
    assert_eq!(
        generated(&folder, &["--ids", "--prompt", "1 0,3", "--max-tokens", "4", "--runtime", "tract"]),
        numbers(&[1, 0, 3], 4) + "\n"
    );
    let refused =
        |prompt| refusal(&["generate", text(folder.path()), "--ids", "--prompt", prompt, "--runtime", "tract"]);
    assert!(refused("bad").contains("\"bad\" is not the number of a token, which --ids asks for"));
    assert!(refused("11").contains("token 11: the model knows 11 tokens, 0 to 10"));
    assert!(refused("-1").contains("token -1: the model knows 11 tokens, 0 to 10"));
    assert!(refused("").contains("prompt: it is empty"));
}

#[test]
fn json_holds_texts_and_tokens() {
    let folder = letters();
    for name in names() {
        let args = ["generate", text(folder.path()), "--prompt", "bad", "--prompt", "c", "--max-tokens", "5", "--json"];
        let (success, printed, errors) = run(&[&args[..], &["--runtime", name]].concat());
        assert!(success && errors.is_empty(), "{errors}");
        let found: serde_json::Value = serde_json::from_str(&printed).unwrap();
        let texts = &found["texts"];
        assert_eq!((&texts[0]["prompt"], &texts[0]["prompt_tokens"]), (&"bad".into(), &serde_json::json!([1, 0, 3])));
        assert_eq!(texts[0]["text"], continuation("bad", 5));
        assert_eq!(texts[0]["tokens"], serde_json::json!(count_on(&[1, 0, 3], 5)));
        assert_eq!(texts[1]["text"], continuation("c", 5));
        assert!(found["prefill_ms"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn wrong_use_is_explained() {
    let folder = letters();
    let generate = |more: &[&str]| refusal(&[&["generate", text(folder.path()), "--runtime", "tract"], more].concat());
    assert!(generate(&["--prompt", "-", "--prompt", "-"]).contains("only one prompt can be read from standard input"));
    for (option, value, expected) in [
        ("--temperature", "-1", "a number from 0 to 1000"),
        ("--temperature", "inf", "a number from 0 to 1000"),
        ("--top-p", "2", "a number from 0 to 1"),
        ("--top-k", "0", "a whole number from 1 to 1000000"),
        ("--max-tokens", "0", "a whole number from 1 to 1000000"),
        ("--max-tokens", "-3", "a whole number from 1 to 1000000"),
        ("--threads", "0", "a whole number from 1 to 1024"),
    ] {
        let errors = generate(&["--prompt", "a", option, value]);
        assert!(errors.starts_with(&format!("error: invalid value '{value}' for '{option} ")), "{errors}");
        assert!(errors.contains(&format!("expected {expected}\n")), "{errors}");
    }
    let tokenizer = folder.path().join("tokenizer.json");
    let larger = std::fs::read_to_string(&tokenizer).unwrap().replace(r#""k": 10"#, r#""k": 99"#);
    std::fs::write(&tokenizer, larger).unwrap();
    let errors = generate(&["--prompt", "a"]);
    let expected = "tokenizer.json: not the model's tokenizer: its token \"k\" is number 99, and the model knows 11";
    assert!(errors.contains(expected), "{errors}");
    for usage in [
        &["--prompt", "a", "--interactive"][..],
        &["--prompt", "a", "--interactive", "--json"],
        &["--prompt", "a", "--stop", ""],
        &["--prompt", "a", "--stop", "b", "--ids"],
        &[],
    ] {
        let args = [&["generate", text(folder.path())], usage].concat();
        assert_eq!(moh_run(&args).output().unwrap().status.code(), Some(2), "{usage:?}");
    }
}
