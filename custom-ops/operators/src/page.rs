//! Generates the operators' reference page.

use crate::{DOMAIN, DType, OPERATORS, VERSION};

/// The reference page of all operators in Markdown, the content of `docs/operators.md`.
pub fn markdown() -> String {
    let mut page = format!(
        "# Operators of `{DOMAIN}`, version {VERSION}\n\nGenerated from `custom-ops/operators/src`. \
         T is one of {}. `..` stands for any number of dimensions; the library for onnxruntime accepts up to 16 in all.\n\n\
         Exported files carry the operators as function bodies too, for runtimes without the kernels. Unlike kernels, bodies \
         need a batch and lengths above 0, because they reshape with -1.\n",
        DType::ALL.map(|t| t.to_string()).join(", ")
    );
    for operator in OPERATORS {
        let since = if operator.since > 1 { format!("Since version {}. ", operator.since) } else { String::new() };
        page += &format!(
            "\n## {}\n\n{since}{}\n\n| input | type | shape | |\n|---|---|---|---|\n",
            operator.name, operator.doc
        );
        for operand in operator.inputs.iter().chain([&operator.output]) {
            let role = if std::ptr::eq(operand, &operator.output) { " (output)" } else { "" };
            let optional = if operand.optional { " (optional)" } else { "" };
            let ty = operand.ty.fixed().map_or("T".to_owned(), |ty| ty.to_string());
            page += &format!("| {}{role}{optional} | {ty} | {} | {} |\n", operand.name, operand.shape, operand.doc);
        }
        if operator.attributes.is_empty() {
            continue;
        }
        page += "\n| attribute | type | |\n|---|---|---|\n";
        for attribute in operator.attributes {
            page += &format!("| {} | {:?} | {} |\n", attribute.name, attribute.kind, attribute.doc.trim());
        }
    }
    page
}
