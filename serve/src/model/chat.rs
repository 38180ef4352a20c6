//! Chat templates: messages to the text that a model continues.

use crate::error::{Error, Result};
use crate::problem::Problem;
use minijinja::{Environment, context};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The name of a chat template in its environment.
const NAME: &str = "chat";

/// A message as templates see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: String,
}

/// A chat template, as `tokenizer_config.json` or `chat_template.jinja` has it.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    begin: Option<String>,
    end: Option<String>,
}

impl ChatTemplate {
    /// The template in a model's folder, if it has one.
    ///
    /// # Errors
    /// [`Error::Template`] for one that cannot be read or is no template.
    pub(crate) fn from_folder(folder: &Path) -> Result<Option<ChatTemplate>> {
        let path = folder.join("tokenizer_config.json");
        let config = match read(&path)? {
            Some(text) => serde_json::from_str(&text).map_err(|e| bad(&path, e.to_string()))?,
            None => Value::Null,
        };
        // As in transformers, a file of its own comes first.
        let own = folder.join("chat_template.jinja");
        let (path, template) = match (read(&own)?, in_config(&config["chat_template"])) {
            (Some(template), _) => (own, template),
            (None, Some(template)) => (path, template.to_owned()),
            (None, None) => return Ok(None),
        };
        // A special token is a text, or an object with its text.
        let token = |key: &str| {
            let token = &config[key];
            token.as_str().or(token["content"].as_str()).map(str::to_owned)
        };
        ChatTemplate::new(template, token("bos_token"), token("eos_token")).map_err(|e| bad(&path, e)).map(Some)
    }

    fn new(template: String, begin: Option<String>, end: Option<String>) -> std::result::Result<ChatTemplate, String> {
        let mut environment = Environment::new();
        // As transformers does.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, without_generation(&template))
            .map_err(|e| format!("its chat template cannot be parsed: {e}"))?;
        Ok(ChatTemplate { environment, begin, end })
    }

    /// The text that the assistant continues.
    ///
    /// # Errors
    /// A [`Problem`] with what the template says of messages that it does not take.
    pub(crate) fn render(&self, messages: &[Message]) -> std::result::Result<String, Problem> {
        let refused = |e: minijinja::Error| {
            let reason = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
            Problem::invalid(format!("messages: the model's chat template refuses them: {reason}"))
        };
        let template = self.environment.get_template(NAME).map_err(refused)?;
        let (bos_token, eos_token) = (self.begin.as_deref().unwrap_or(""), self.end.as_deref().unwrap_or(""));
        // What transformers gives a template that is not said.
        let (tools, documents) = ((), ());
        template
            .render(context! { messages, tools, documents, add_generation_prompt => true, bos_token, eos_token })
            .map_err(refused)
    }
}

/// Tags that mark what an assistant said, for training, as tags that are always true: they trim the spaces around them as before.
fn without_generation(template: &str) -> String {
    let (mut result, mut rest) = (String::with_capacity(template.len()), template);
    while let Some((before, tag)) = rest.split_once("{%") {
        let Some((inner, after)) = tag.split_once("%}") else { break };
        let bare = inner.trim_matches(['-', '+']);
        let inner = match bare.trim() {
            "generation" => inner.replace("generation", "if true"),
            "endgeneration" => inner.replace("endgeneration", "endif"),
            _ => inner.to_owned(),
        };
        result.extend([before, "{%", &inner, "%}"]);
        rest = after;
    }
    result + rest
}

/// The filter `tojson` as transformers has it: JSON as Python writes it, which escapes nothing for HTML.
fn to_json(
    value: minijinja::Value,
    options: minijinja::value::Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, OneLine)),
        Some(indent) => {
            let indent = " ".repeat(indent);
            let lines = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, lines))
        }
    };
    let bad = |e: String| minijinja::Error::new(minijinja::ErrorKind::BadSerialization, e);
    written.map_err(|e| bad(e.to_string()))?;
    String::from_utf8(json).map_err(|e| bad(e.to_string()))
}

/// JSON on one line, with a space after each comma and colon.
struct OneLine;

impl serde_json::ser::Formatter for OneLine {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// One template, or the one called `default` of several.
fn in_config(value: &Value) -> Option<&str> {
    let named = |entry: &&Value| entry["name"] == "default";
    value.as_str().or_else(|| value.as_array()?.iter().find(named)?["template"].as_str())
}

fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(bad(path, format!("cannot be read: {e}"))),
    }
}

fn bad(path: &Path, problem: String) -> Error {
    Error::Template { path: PathBuf::from(path), problem }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}\n{% if message['role'] not in ['user', 'assistant', 'system'] %}\n\
        {{ raise_exception('no role ' + message['role']) }}\n{% endif %}\n<{{ message.role }}>{{ message['content'].strip() }}\
        {{ eos_token }}{% endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}";

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn messages_are_rendered_as_transformers_does() {
        let template = ChatTemplate::new(TEMPLATE.to_owned(), Some("<s>".to_owned()), None).unwrap();
        let rendered = template.render(&[message("system", " be brief "), message("user", "hello")]);
        assert_eq!(rendered.unwrap(), "<s><system>be brief<user>hello<assistant>");
        let refused = template.render(&[message("robot", "x")]).unwrap_err();
        assert!(refused.message.ends_with("refuses them: no role robot"), "{}", refused.message);
    }

    #[test]
    fn templates_have_what_transformers_gives_them() {
        let rendered = |template: &str| {
            let template = ChatTemplate::new(template.to_owned(), None, None)?;
            template.render(&[message("user", "<a>"), message("assistant", "é\n")]).map_err(|problem| problem.message)
        };
        for (template, expected) in [
            ("{% if tools is not none or documents is not none %}tools{% endif %}.", "."),
            ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
                "assistant",
            ),
            ("a {%- generation -%} b {% endgeneration %}\nc{%-endgenerations%}", "error"),
            ("a {%- generation -%} b {% endgeneration %}\nc", "ab c"),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "<a>"}"#),
            ("{{ [1, messages[1].content] | tojson(ensure_ascii=false) }}", r#"[1, "é\n"]"#),
            ("{{ messages[0] | tojson(indent=2) }}", "{\n  \"role\": \"user\",\n  \"content\": \"<a>\"\n}"),
        ] {
            let found = rendered(template);
            match expected {
                "error" => assert!(found.is_err(), "{template}"),
                _ => assert_eq!(found.as_deref(), Ok(expected), "{template}"),
            }
        }
    }

    #[test]
    fn templates_are_found_where_models_have_them() {
        let found = |files: &[(&str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in files {
                std::fs::write(folder.path().join(name), text).unwrap();
            }
            let template = ChatTemplate::from_folder(folder.path()).map_err(|e| e.to_string())?;
            Ok::<_, String>(template.map(|template| template.render(&[message("user", "x")]).unwrap()))
        };
        let config = "tokenizer_config.json";
        assert_eq!(found(&[]), Ok(None));
        assert_eq!(found(&[(config, "{}")]), Ok(None));
        assert_eq!(
            found(&[(config, r#"{"chat_template": "{{ bos_token }}a", "bos_token": {"content": "<s>"}}"#)]),
            Ok(Some("<s>a".to_owned()))
        );
        let several = r#"{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        assert_eq!(found(&[(config, several)]), Ok(Some("d".to_owned())));
        assert_eq!(found(&[(config, "{}"), ("chat_template.jinja", "j")]), Ok(Some("j".to_owned())));
        let both = [(config, r#"{"chat_template": "c"}"#), ("chat_template.jinja", "j")];
        assert_eq!(found(&both), Ok(Some("j".to_owned())));
        assert!(found(&[(config, r#"{"chat_template": "{% if %}"}"#)]).unwrap_err().contains("chat template"));
        assert!(found(&[(config, "nothing")]).unwrap_err().contains(config));
    }
}
