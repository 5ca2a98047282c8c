//! The measured values, pair by pair, and their output.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use crate::subject::BenchSubject;

/// The direction in which a value is better.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BetterValue {
    Lower,
    Higher,
}

/// One number of one round.
pub(crate) struct RoundValue {
    pub(crate) row: String,
    pub(crate) better: BetterValue,
    pub(crate) number: f64,
}

impl RoundValue {
    pub(crate) fn lower(row: impl Into<String>, number: f64) -> Self {
        Self { row: row.into(), better: BetterValue::Lower, number }
    }

    pub(crate) fn higher(row: impl Into<String>, number: f64) -> Self {
        Self { row: row.into(), better: BetterValue::Higher, number }
    }
}

/// Rows in the order in which they were first recorded.
#[derive(Default, Serialize)]
pub(crate) struct ResultTable {
    rows: Vec<ResultRow>,
}

#[derive(Serialize)]
struct ResultRow {
    name: String,
    better: BetterValue,
    /// One value per round; the same position is the same round for all subjects.
    values: BTreeMap<&'static str, Vec<f64>>,
}

impl ResultTable {
    pub(crate) fn record(&mut self, subject: BenchSubject, value: RoundValue) {
        let known = self.rows.iter().position(|row| row.name == value.row);
        let at = known.unwrap_or_else(|| {
            let RoundValue { row: name, better, .. } = value;
            self.rows.push(ResultRow { name, better, values: BTreeMap::new() });
            self.rows.len() - 1
        });
        self.rows[at].values.entry(subject.name()).or_default().push(value.number);
    }

    /// Adds, for each row of this name, a row with what the subjects add to `base`.
    pub(crate) fn compare(&mut self, name: &str, base: BenchSubject) {
        let mut added = vec![];
        for row in self.rows.iter().filter(|row| row.name.contains(name)) {
            let Some(zero) = row.values.get(base.name()) else { continue };
            let others = row.values.iter().filter(|(subject, _)| **subject != base.name());
            let less = |all: &[f64]| all.iter().zip(zero).map(|(one, zero)| one - zero).collect();
            let values: BTreeMap<_, _> =
                others.map(|(subject, all)| (*subject, less(all))).collect();
            if values.is_empty() {
                continue;
            }
            let name = row.name.replace(name, &format!("added {name}"));
            added.push(ResultRow { name, better: row.better, values });
        }
        self.rows.append(&mut added);
    }

    /// Renders a Markdown table: medians with the spread of the rounds, and the gateway's ratio to the better nginx.
    pub(crate) fn render(&self, subjects: &[BenchSubject]) -> String {
        let mut text = String::from("| measurement |");
        for subject in subjects {
            let _infallible = write!(text, " {} |", subject.name());
        }
        let compares =
            subjects.contains(&BenchSubject::Ours) && subjects.iter().any(|s| s.is_nginx());
        text.push_str(if compares { " ours / best nginx |" } else { "" });
        text.push_str("\n|---|");
        text.push_str(&"---:|".repeat(subjects.len() + usize::from(compares)));
        for row in &self.rows {
            let _infallible = write!(text, "\n| {} |", row.name);
            for subject in subjects {
                let cell =
                    row.values.get(subject.name()).map_or("–".to_owned(), |all| format_cell(all));
                let _infallible = write!(text, " {cell} |");
            }
            if compares {
                let ratio = row.ratio(subjects).unwrap_or("–".to_owned());
                let _infallible = write!(text, " {ratio} |");
            }
        }
        text.push('\n');
        text
    }
}

impl ResultRow {
    /// Returns the gateway's value over that of the better nginx, round by round.
    fn ratio(&self, subjects: &[BenchSubject]) -> Option<String> {
        let ours = self.values.get(BenchSubject::Ours.name())?;
        let rivals = subjects.iter().filter(|subject| subject.is_nginx());
        let rivals = rivals.filter_map(|rival| self.values.get(rival.name()));
        let best = rivals.min_by(|one, other| {
            let order = median_of(one).total_cmp(&median_of(other));
            match self.better {
                BetterValue::Lower => order,
                BetterValue::Higher => order.reverse(),
            }
        })?;
        let ratios: Vec<f64> = ours.iter().zip(best).map(|(ours, theirs)| ours / theirs).collect();
        let (low, high) =
            (interpolate_quantile(&ratios, 0.25), interpolate_quantile(&ratios, 0.75));
        Some(format!("**{:.2}** ({low:.2}–{high:.2})", median_of(&ratios)))
    }
}

/// Formats the median with half the distance between the quartiles.
fn format_cell(values: &[f64]) -> String {
    if let [only] = values {
        return format_value(*only);
    }
    let spread = (interpolate_quantile(values, 0.75) - interpolate_quantile(values, 0.25)) / 2.0;
    format!("{} ±{}", format_value(median_of(values)), format_value(spread))
}

fn format_value(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

pub(crate) fn median_of(values: &[f64]) -> f64 {
    interpolate_quantile(values, 0.5)
}

/// Interpolates between neighbours, because there are few rounds.
fn interpolate_quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = q * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}
