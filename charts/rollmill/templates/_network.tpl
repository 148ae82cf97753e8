{{/* Ports as a NetworkPolicy has them, of a list of numbers. */}}
{{- define "rollmill.tcp" -}}
ports:
{{- range . }}
  - { protocol: TCP, port: {{ int . }} }
{{- end }}
{{- end -}}

{{/* The ports that a text names, such as kafka-0:9093,kafka-1:9093 or http://vllm:8000/v1, as a comma-separated list. */}}
{{- define "rollmill.portsOf" -}}
{{- $found := list -}}
{{- range regexFindAll ":[0-9]+(,|/|$)" . -1 -}}
{{- $found = append $found (regexFind "[0-9]+" .) -}}
{{- end -}}
{{- join "," ($found | uniq) -}}
{{- end -}}

{{/* An egress rule; of a dict with peers, ports (numbers), from (a text that names ports) and missing (what to do). */}}
{{- define "rollmill.egress" -}}
{{- $ports := .ports | default (without (splitList "," (include "rollmill.portsOf" .from)) "") -}}
{{- if not $ports }}{{ fail .missing }}{{ end -}}
- {{ include "rollmill.tcp" $ports | nindent 2 | trim }}
  {{- with .peers }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
