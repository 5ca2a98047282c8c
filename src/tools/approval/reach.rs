//! The runs whose questions and standing approvals a reader sees, by their agents and accounts.

/// The agents and accounts of the runs that a reader sees. A `*` at the end of a name stands for any rest, and an empty
/// list for all names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalReach {
    pub agents: Vec<String>,
    pub accounts: Vec<String>,
}

impl ApprovalReach {
    /// Returns the values of the parameters `?5` and `?6` of the condition: lists as JSON, or NULL for all names.
    pub(super) fn parameters(&self) -> [Option<String>; 2] {
        let to_list = |names: &Vec<String>| {
            (!names.is_empty()).then(|| serde_json::to_string(names).unwrap_or_default())
        };
        [to_list(&self.agents), to_list(&self.accounts)]
    }
}

/// Returns the condition on the columns `agent` and `account`. It is part of the query, so that each page is full.
pub(super) fn reach_condition() -> String {
    let covers = |column: &str, names: &str| {
        format!(
            "({names} IS NULL OR EXISTS (SELECT 1 FROM json_each({names}) WHERE value = {column}
             OR (value LIKE '%*' AND substr({column}, 1, length(value) - 1) = substr(value, 1, length(value) - 1))))"
        )
    };
    format!("{} AND {}", covers("agent", "?5"), covers("account", "?6"))
}
